"""Study runner: a fixed list of trials that several processes may share without repeating any."""
