"""Tables and pictures about labels: votes, and learning curves over the number of pairs."""
