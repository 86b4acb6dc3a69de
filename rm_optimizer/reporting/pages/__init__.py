"""Self-contained pages of HTML: results, pictures and settings in one file that needs no network."""
