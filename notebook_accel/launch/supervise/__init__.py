"""What runs in the notebook while workers run: it starts, watches and stops them."""
