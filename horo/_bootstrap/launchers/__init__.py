"""What each launcher tells a process: its rank, the size of the job and the way to the job's store."""
