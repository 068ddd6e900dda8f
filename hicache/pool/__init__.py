"""Where things live: equal parents of one arena, cut into blocks and counted. Knows nothing of what they hold."""
