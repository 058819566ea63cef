"""What viewtrack costs, told as ratios to what stock PyTorch costs: `python -m benchmarks`."""
