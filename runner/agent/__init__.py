"""One host: its machine, its ranks, and the agent that starts them where hororun itself does not run."""
