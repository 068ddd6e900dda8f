"""L3: records on disk behind one small interface. Never imports core, copy or torch."""
