"""Models from Hugging Face folders and into them; how a model's parameters are called there is said beside the model."""

from jgraph.interop.folder import Folder as Folder
from jgraph.interop.names import HuggingFace as HuggingFace
from jgraph.interop.names import Part as Part
from jgraph.interop.names import side_by_side as side_by_side
