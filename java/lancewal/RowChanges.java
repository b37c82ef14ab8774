package lancewal;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import java.util.Set;
import java.util.TreeSet;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.DeltaBatchWrite;
import org.apache.spark.sql.connector.write.DeltaWrite;
import org.apache.spark.sql.connector.write.DeltaWriteBuilder;
import org.apache.spark.sql.connector.write.DeltaWriter;
import org.apache.spark.sql.connector.write.DeltaWriterFactory;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.RowLevelOperationInfo;
import org.apache.spark.sql.connector.write.SupportsDelta;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * DELETE, UPDATE and MERGE as changes by key: a row that goes is its key and the word "delete", any
 * other is written as a whole. They land as one write of the format, with a change type column.
 */
final class RowChanges implements SupportsDelta {
  static final String CHANGE = "__lancewal_change";
  /** How much a task holds before it hands rows on. */
  private static final long HELD_BYTES = 64L << 20;

  private final LanceTable table;
  private final RowLevelOperationInfo info;

  RowChanges(LanceTable table, RowLevelOperationInfo info) {
    this.table = table;
    this.info = info;
    if (table.described.key().length == 0) {
      throw new UnsupportedOperationException(
          info.command() + " needs a primary key, and the table " + table.name() + " has none");
    }
    refuseTwins(table.described.schema());
  }

  /** Spark keeps a column as it is by its name, in any case unless told otherwise, and takes the first one. */
  private static void refuseTwins(StructType columns) {
    Set<String> names = new TreeSet<>(String.CASE_INSENSITIVE_ORDER);
    for (String name : columns.fieldNames()) {
      if (!names.add(name) && !SQLConf.get().caseSensitiveAnalysis()) {
        throw new UnsupportedOperationException(
            "another column differs from "
                + name
                + " in case only, and Spark would write the one into the other; set spark.sql.caseSensitive to true");
      }
    }
  }

  @Override
  public Command command() {
    return info.command();
  }

  @Override
  public String description() {
    return "lancewal " + info.command();
  }

  @Override
  public NamedReference[] rowId() {
    // Quoted: Spark parses the name, and it may have a comma.
    return Arrays.stream(table.described.key())
        .map(name -> Expressions.column("`" + name.replace("`", "``") + "`"))
        .toArray(NamedReference[]::new);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return table.newScanBuilder(options);
  }

  @Override
  public DeltaWriteBuilder newWriteBuilder(LogicalWriteInfo write) {
    StructType columns = new StructType();
    for (StructField field : table.described.schema().fields()) {
      // A delete has nothing but its key.
      columns = columns.add(field.name(), field.dataType(), true);
    }
    StructType changes = columns.add(CHANGE, DataTypes.StringType, false);
    java.util.Map<String, String> options = new java.util.HashMap<>(write.options().asCaseSensitiveMap());
    options.put("changeTypeColumn", CHANGE);
    // A MERGE may delete a row and insert one with the same key, in any order and in different tasks.
    options.put("deletesFirst", "true");
    BatchWrite python =
        table
            .pythonWriter(write.queryId(), changes, new CaseInsensitiveStringMap(options))
            .build()
            .toBatch();
    int[] idPlaces = places(changes, write.rowIdSchema().orElseGet(StructType::new));
    int[] rowPlaces = places(changes, write.schema());
    int[] keyPlaces = Arrays.stream(table.described.key()).mapToInt(changes::fieldIndex).toArray();
    return new DeltaWriteBuilder() {
      @Override
      public DeltaWrite build() {
        return new DeltaWrite() {
          @Override
          public DeltaBatchWrite toBatch() {
            return new Write(python, changes, idPlaces, rowPlaces, keyPlaces);
          }
        };
      }
    };
  }

  /** Where each column of {@code given} goes; a row of another operation has none. */
  private static int[] places(StructType changes, StructType given) {
    return Arrays.stream(given.fieldNames()).mapToInt(changes::fieldIndex).toArray();
  }

  private record Write(
      BatchWrite python, StructType changes, int[] idPlaces, int[] rowPlaces, int[] keyPlaces)
      implements DeltaBatchWrite {
    @Override
    public DeltaWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
      return new Factory(python.createBatchWriterFactory(info), changes, idPlaces, rowPlaces, keyPlaces);
    }

    @Override
    public boolean useCommitCoordinator() {
      return python.useCommitCoordinator();
    }

    @Override
    public void commit(WriterCommitMessage[] messages) {
      python.commit(parts(messages));
    }

    @Override
    public void abort(WriterCommitMessage[] messages) {
      python.abort(parts(messages));
    }

    private static WriterCommitMessage[] parts(WriterCommitMessage[] messages) {
      return Arrays.stream(messages)
          .filter(Objects::nonNull)
          .flatMap(message -> ((Written) message).parts().stream())
          .toArray(WriterCommitMessage[]::new);
    }
  }

  private record Written(List<WriterCommitMessage> parts) implements WriterCommitMessage {}

  private record Factory(
      DataWriterFactory python, StructType changes, int[] idPlaces, int[] rowPlaces, int[] keyPlaces)
      implements DeltaWriterFactory {
    @Override
    public DeltaWriter<InternalRow> createWriter(int partition, long task) {
      return new Writer(this, partition, task);
    }
  }

  /**
   * Spark pushes changes one by one, and a Python writer pulls them: they go over in large parts, each of
   * deletes or of upserts alone.
   */
  private static final class Writer implements DeltaWriter<InternalRow> {
    private static final UTF8String UPSERT = UTF8String.fromString("upsert");
    private static final UTF8String DELETE = UTF8String.fromString("delete");

    private final Factory factory;
    private final int partition;
    private final long task;
    private final UnsafeProjection packing;
    private final List<InternalRow> deletes = new ArrayList<>();
    private final List<InternalRow> upserts = new ArrayList<>();
    private final List<WriterCommitMessage> written = new ArrayList<>();
    private long heldBytes;

    Writer(Factory factory, int partition, long task) {
      this.factory = factory;
      this.partition = partition;
      this.task = task;
      this.packing = UnsafeProjection.create(factory.changes());
    }

    @Override
    public void delete(InternalRow metadata, InternalRow id) {
      add(id, factory.idPlaces(), DELETE);
    }

    @Override
    public void update(InternalRow metadata, InternalRow id, InternalRow row) {
      InternalRow before = spread(id, factory.idPlaces(), UPSERT);
      InternalRow after = spread(row, factory.rowPlaces(), UPSERT);
      for (int place : factory.keyPlaces()) {
        var type = factory.changes().fields()[place].dataType();
        // Deeply: keys of bytes are arrays.
        if (!Objects.deepEquals(before.get(place, type), after.get(place, type))) {
          throw new UnsupportedOperationException(
              "UPDATE and MERGE cannot change a primary key; delete the row and insert another");
        }
      }
      add(row, factory.rowPlaces(), UPSERT);
    }

    @Override
    public void insert(InternalRow row) {
      add(row, factory.rowPlaces(), UPSERT);
    }

    @Override
    public WriterCommitMessage commit() {
      handOverAll();
      return new Written(new ArrayList<>(written));
    }

    @Override
    public void abort() {
      close();
    }

    @Override
    public void close() {
      deletes.clear();
      upserts.clear();
    }

    private void add(InternalRow row, int[] places, UTF8String change) {
      UnsafeRow packed = packing.apply(spread(row, places, change)).copy();
      (change == DELETE ? deletes : upserts).add(packed);
      heldBytes += packed.getSizeInBytes();
      if (heldBytes >= HELD_BYTES) {
        handOverAll();
      }
    }

    private InternalRow spread(InternalRow row, int[] places, UTF8String change) {
      StructField[] fields = factory.changes().fields();
      Object[] values = new Object[fields.length];
      for (int i = 0; i < places.length; i++) {
        values[places[i]] = row.get(i, fields[places[i]].dataType());
      }
      values[fields.length - 1] = change;
      return new GenericInternalRow(values);
    }

    private void handOverAll() {
      handOver(deletes);
      handOver(upserts);
      heldBytes = 0;
    }

    private void handOver(List<InternalRow> held) {
      if (held.isEmpty()) {
        return;
      }
      try (DataWriter<InternalRow> python = factory.python().createWriter(partition, task)) {
        python.writeAll(held.iterator());
        written.add(python.commit());
      } catch (java.io.IOException error) {
        throw new java.io.UncheckedIOException(error);
      }
      held.clear();
    }
  }
}
