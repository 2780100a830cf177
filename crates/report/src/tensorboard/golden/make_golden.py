"""Writes the records that record.rs is checked against, with TensorBoard's own classes. Run by hand:

    pip install tensorboard
    python make_golden.py
"""

import io
import pathlib

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
from tensorboard.summary.writer.record_writer import RecordWriter


class Memory(io.BytesIO):
    def close(self):
        pass


def value(tag, number):
    return summary_pb2.Summary.Value(tag=tag, simple_value=number)


plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
text = summary_pb2.Summary.Value(
    tag="config",
    metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
    tensor=tensor_pb2.TensorProto(
        dtype=7, string_val=[b"a **b**"], tensor_shape=tensor_shape_pb2.TensorShapeProto()
    ),
)
start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
scalars = summary_pb2.Summary(value=[value("train/loss", 2.5), value("train/lr", 1e-3)])
for name, fields in {
    "version": {"file_version": "brain.Event:2"},
    "restart": {"session_log": start},
    "scalars": {"summary": scalars},
    "text": {"summary": summary_pb2.Summary(value=[text])},
}.items():
    memory = Memory()
    RecordWriter(memory).write(event_pb2.Event(wall_time=1.5, step=300, **fields).SerializeToString())
    pathlib.Path(__file__).with_name(f"{name}.hex").write_text(memory.getvalue().hex() + "\n")
