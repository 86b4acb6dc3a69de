"""Self-contained HTML pages: results, pictures and settings in one file that needs no network."""
