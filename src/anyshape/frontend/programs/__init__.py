"""Programs: from one captured graph to what runs it, with fall backs to eager PyTorch."""
