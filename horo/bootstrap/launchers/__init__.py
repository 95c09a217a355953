"""The variables of each launcher: a process's rank, the size of the job, the address of the job's store."""
