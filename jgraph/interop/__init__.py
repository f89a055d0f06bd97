"""Reads models from Hugging Face folders and writes them. Each model defines the names of its parameters in such a folder."""

from jgraph.interop.folder import Folder as Folder
from jgraph.interop.names import HuggingFace as HuggingFace, Part as Part, side_by_side as side_by_side
