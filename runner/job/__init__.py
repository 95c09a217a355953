"""A whole job: placement, environment, supervision, output and report."""
