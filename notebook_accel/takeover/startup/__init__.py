"""The folder that PYTHONPATH names in processes that are to take over: Python imports its `sitecustomize` first."""
