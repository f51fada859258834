"""Not installed with the package. This file makes it win over folders of the same name that others install."""
