"""The model as a distribution over replies: sampling, log-probabilities, entropies, values, choices."""
