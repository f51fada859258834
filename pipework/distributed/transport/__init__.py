"""Messages between ranks: channels, packets, headers."""
