"""Labels that are probably wrong, and how far annotators agree."""
