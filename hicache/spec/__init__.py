"""What a model's cache looks like: groups, model, geometry, layout. Imports only `base`."""
