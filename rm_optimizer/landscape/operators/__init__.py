"""Hessian, Gauss-Newton and Fisher matrices of a loss, known by their products with vectors."""
