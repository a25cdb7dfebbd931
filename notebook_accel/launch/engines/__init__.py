"""Ways to run a job: in this process, or in processes on this machine, other hosts or a cluster."""
