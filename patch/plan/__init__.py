"""What a run needs, by arithmetic over its configuration: parameters, FLOPs, bytes. Imports no torch."""
