// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"

	"github.com/anishathalye/porcupine"
)

// A record is one operation of one client, one line of JSON in a history.
type record struct {
	Client   int     `json:"client"`
	Op       string  `json:"op"`
	Key      string  `json:"key"`
	Value    string  `json:"value"`
	Expected string  `json:"expected"`
	Delta    int64   `json:"delta"`
	Call     int64   `json:"call"`   // nanoseconds
	Return   *int64  `json:"return"` // absent: nobody knows whether it was done
	Output   *string `json:"output"` // absent: no answer, or the answer that there is no value
}

func (r record) String() string {
	output := "nothing"
	if r.Output != nil {
		output = fmt.Sprintf("%q", *r.Output)
	}
	if r.Return == nil {
		output = "an unknown end"
	}
	switch r.Op {
	case "cas":
		return fmt.Sprintf("cas %s %q to %q -> %s", r.Key, r.Expected, r.Value, output)
	case "add":
		return fmt.Sprintf("add %d to %s -> %s", r.Delta, r.Key, output)
	case "set", "append", "join", "leave":
		return fmt.Sprintf("%s %s %q -> %s", r.Op, r.Key, r.Value, output)
	}
	return fmt.Sprintf("%s %s -> %s", r.Op, r.Key, output)
}

// readHistory reads JSON lines. An operation that only looks and has no end tells nothing.
func readHistory(source io.Reader) ([]porcupine.Operation, error) {
	var history []porcupine.Operation
	lines := bufio.NewScanner(source)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("line %d: %w", len(history)+1, err)
		}
		end := int64(math.MaxInt64)
		if r.Return != nil {
			end = *r.Return
		} else if looks[r.Op] {
			continue
		}
		history = append(history, porcupine.Operation{
			ClientId: r.Client, Input: r, Call: r.Call, Output: r, Return: end,
		})
	}
	return history, lines.Err()
}

var looks = map[string]bool{"get": true, "wait": true, "check": true, "members": true}
