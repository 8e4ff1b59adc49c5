"""Post-expert norm and weighted sum of routed rows."""
