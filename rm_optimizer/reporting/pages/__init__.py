"""Pages of runs and studies: results, pictures and settings in one file that needs no network."""
