"""The job's secret: proof that both ends know it, frames with a MAC, and credentials that bring it to the ranks."""
