"""Tables and pictures of what labels buy and hold: savings, cleaning, votes, and curves over the number of pairs."""
