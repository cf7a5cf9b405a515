"""An equation and a logical mesh go in; its strategies with their seconds come out, and the cost of resharding."""
