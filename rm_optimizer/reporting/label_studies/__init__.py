"""Tables and pictures of what labels buy: savings of a rule, and curves over the number of pairs."""
