"""All that knows Ray: sessions, actors, files for nodes, jobs; and `run`, which uses them."""
