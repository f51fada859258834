"""What a step will cost: its time, and the bytes on each device."""
