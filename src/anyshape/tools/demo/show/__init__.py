"""What a person sees of the demo while it runs: tables, lines, a chart, and the strategy that was chosen."""
