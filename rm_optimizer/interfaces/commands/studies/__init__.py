"""`rm-opt study`: studies that test the claims of rm-opt; repeating a stopped command continues its study."""
