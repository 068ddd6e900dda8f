"""Engine connectors. Each imports its engine; nothing imports a connector."""
