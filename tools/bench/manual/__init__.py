"""Steps with manual optimization at every small shape, against one device."""
