"""What is looked at before anything starts: arguments, addresses, this process, and libraries to import first."""
