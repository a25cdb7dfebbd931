"""Ways to run a job: in this process, or in processes that torch elastic manages."""
