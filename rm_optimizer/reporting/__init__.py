"""Pictures and tables of results; draws what others computed."""
