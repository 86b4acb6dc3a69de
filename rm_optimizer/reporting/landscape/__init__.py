"""Pictures, tables and rows of loss landscapes and curvature."""
