"""The search for stages: a step in layers and a cluster in, stages with their submeshes and logical shapes out."""
