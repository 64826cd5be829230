"""What auto picks, side by side with plain DDP and every fixed shape; predicted against measured."""
