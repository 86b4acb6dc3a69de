"""The validation of the readiness score: worlds with a known gold reward, populations of reward models, policies."""
