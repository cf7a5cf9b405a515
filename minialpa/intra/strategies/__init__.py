"""An equation and a logical mesh in; its strategies with their seconds out, and the cost of resharding."""
