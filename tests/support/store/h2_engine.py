# SPDX-License-Identifier: Apache-2.0
"""A second engine for the same connection, on the package h2: to compare, never to ship.

It is slow, and after a GOAWAY it takes an answer under way for a fault.
"""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from rdzv.store.http2.engine import CONNECTION_WINDOW, STREAM_WINDOW
from rdzv.store.http2.frames import (
    MAX_LIST_BYTES,
    ConnectionFaultError,
    EngineListener,
    ErrorCode,
    HeaderDecoder,
)


class H2Engine:
    """An ``Engine``; it does not know what was taken, so that all it has begun counts as sent."""

    def __init__(self, listener: EngineListener) -> None:
        self._listener = listener
        self._h2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
            )
        )
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - 65535)
        self._pending: dict[int, tuple[bytes, bool]] = {}
        self._settled = False
        self.draining = False

    @property
    def full(self) -> bool:
        return self._h2.open_outbound_streams >= self._h2.remote_settings.max_concurrent_streams

    def begin(self, block: bytes, data: bytes, *, ended: bool) -> int:
        stream_id = self._h2.get_next_available_stream_id()
        fields = HeaderDecoder().decode(block)
        self._h2.send_headers(stream_id, fields, end_stream=ended and not data)
        if data:
            self._pending[stream_id] = (data, ended)
            self._pump()
        return stream_id

    def send(self, stream_id: int, data: bytes) -> None:
        before, ended = self._pending.get(stream_id, (b"", False))
        self._pending[stream_id] = (before + data, ended)
        self._pump()

    def cancel(self, stream_id: int) -> bool:
        unsent = self._pending.pop(stream_id, None) is not None
        try:
            self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        except ProtocolError:
            return False
        return unsent

    def unsent(self, stream_id: int) -> bool:
        return stream_id in self._pending

    def release(self, stream_id: int, counted: int) -> None:
        self._h2.acknowledge_received_data(counted, stream_id)

    def ping(self) -> None:
        self._h2.ping(bytes(8))

    def take(self) -> bytes:
        return self._h2.data_to_send()

    def feed(self, data: bytes) -> None:
        try:
            events = self._h2.receive_data(data)
        except ProtocolError as error:
            raise ConnectionFaultError(ErrorCode(int(error.error_code)), str(error)) from None
        ended = {event.stream_id for event in events if isinstance(event, StreamEnded)}
        for number, event in enumerate(events):
            last = not any(
                isinstance(one, DataReceived | ResponseReceived | TrailersReceived)
                and one.stream_id == getattr(event, "stream_id", 0)
                for one in events[number + 1 :]
            )
            match event:
                case DataReceived():
                    self._listener.data(
                        event.stream_id,
                        event.data,
                        event.flow_controlled_length,
                        last and event.stream_id in ended,
                    )
                case ResponseReceived() | TrailersReceived():
                    fields = tuple((bytes(name), bytes(value)) for name, value in event.headers)
                    self._listener.headers(
                        event.stream_id, fields, last and event.stream_id in ended
                    )
                case StreamReset():
                    self._pending.pop(event.stream_id, None)
                    if event.error_code == ErrorCodes.REFUSED_STREAM:
                        self._listener.refused(event.stream_id)
                    else:
                        self._listener.broken(event.stream_id, int(event.error_code))
                case RemoteSettingsChanged() if not self._settled:
                    self._settled = True
                    self._listener.settled()
                case ConnectionTerminated():
                    self.draining = True
                case WindowUpdated() | RemoteSettingsChanged():
                    pass
        for stream_id in ended:
            self._pending.pop(stream_id, None)
        self._pump()

    def _pump(self) -> None:
        for stream_id, (data, ended) in tuple(self._pending.items()):
            while data:
                room = min(
                    self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size
                )
                if room <= 0:
                    break
                part, data = data[:room], data[room:]
                self._h2.send_data(stream_id, part, end_stream=ended and not data)
            if data:
                self._pending[stream_id] = (data, ended)
            else:
                del self._pending[stream_id]
