"""Model adapters. `adapter` is the seam; one module for each way to reach a model."""
