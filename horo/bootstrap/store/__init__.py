"""The job's store: its protocol, horo's own server and client, and a store that rank 0 hosts."""
