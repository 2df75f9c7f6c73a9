"""The operator: TrainingJob resources of a cluster, as jobs of the yard."""
