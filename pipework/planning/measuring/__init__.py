"""What copies of layers show when they run: times and bytes, for a balance, a profile, a prediction or a plan."""
