"""Authentication by the job's secret: the handshake, frames with a MAC, credentials that carry the secret."""
