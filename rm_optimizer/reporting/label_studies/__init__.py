"""Tables and pictures about labels: savings, cleaning, votes, and learning curves over the number of pairs."""
