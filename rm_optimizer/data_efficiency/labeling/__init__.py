"""Questions for people who label pairs, their answers, and a local page for answering."""
