"""What benchmarks/ and examples/paper/ share: problems, methods, what they cost, and records of what was measured."""
