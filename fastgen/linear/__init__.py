"""How the model's projections are computed within our forwards."""
